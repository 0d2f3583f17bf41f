"""An OpenAI-compatible server, a chat page and a terminal chat, all with a drafter; part of the workshop, never
travels.
"""
