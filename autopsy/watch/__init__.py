"""The watch: it runs somebody's script, and calls the examination when a number is bad."""
