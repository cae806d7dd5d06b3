"""What can be wrong with data, by its format; `mmvttt.engine.annotation_check` puts it together."""
