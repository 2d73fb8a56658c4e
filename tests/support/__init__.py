"""What several test files use: models, data, commands and checks. Test files import from here, never from each other."""
