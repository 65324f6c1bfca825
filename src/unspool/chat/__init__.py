"""Conversations: messages and tools to a prompt, an answer's text to content and tool calls.

Used by the library, the command line and the server alike; knows nothing of HTTP and nothing of the engine.
"""
