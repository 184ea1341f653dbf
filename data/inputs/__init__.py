"""Read the text from which a corpus is made: kinds of sources, and formats of files."""
