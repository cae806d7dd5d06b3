"""What can be wrong with data, by its format; `annotations` puts it together."""
