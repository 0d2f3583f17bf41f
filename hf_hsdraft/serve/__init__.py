"""An OpenAI-compatible server and a terminal chat, both with a drafter."""
