"""An OpenAI-compatible server, a chat page and a terminal chat, all with a drafter."""
