"""What training measures."""
