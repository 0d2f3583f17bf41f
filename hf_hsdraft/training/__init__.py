"""Everything that makes a drafter: prompts, answers, cached features, loss and trainer."""
