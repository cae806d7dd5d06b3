"""Folders of annotated pictures, as people have them on their disks, and checks of data sets."""
