"""What drafts and texts are compared with: implementations of published formats, exact distributions, scripts."""
