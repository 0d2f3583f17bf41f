"""An OpenAI-compatible server and a chat in the terminal, both with a drafter; part of the workshop, never travels."""
