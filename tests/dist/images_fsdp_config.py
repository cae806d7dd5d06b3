# The small classifier, sharded.
_base_ = ['images_config.py', '../../configs/_base_/fsdp.py']
