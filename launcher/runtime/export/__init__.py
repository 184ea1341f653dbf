"""Export to Hugging Face format."""
