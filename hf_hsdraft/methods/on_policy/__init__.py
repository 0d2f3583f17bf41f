"""Training on the tokens that the drafter itself drafts."""
