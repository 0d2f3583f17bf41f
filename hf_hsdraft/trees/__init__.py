"""What is proposed: draft trees as plain data, the builders that grow them, and their attention masks."""
