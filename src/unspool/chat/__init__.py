"""Conversations: messages and tools to a prompt, an answer's text to content and tool calls.

Used by the library, the command line and the server; independent of HTTP and of the engine.
"""
