"""What people have on their disks: folders of annotated pictures, and checks of data sets."""
