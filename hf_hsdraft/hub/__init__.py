"""A drafter as files: `package_care`, `model_card` and `code_files` stay with the package, the rest travels."""
