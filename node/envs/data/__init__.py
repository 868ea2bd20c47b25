"""Questions and answers of a file: read, kept, posed and scored."""
