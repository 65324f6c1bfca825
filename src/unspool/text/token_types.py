"""Types of tokens, as SentencePiece and GGUF number them."""

NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = range(1, 7)
