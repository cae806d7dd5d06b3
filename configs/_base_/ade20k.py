# ADE20K, crops of 512×512, 150 classes; 2 images on each of 8 GPUs.
# The images and labels are looked for under $MMVTTT_DATA/ade/ADEChallengeData2016,
# by default under data/.
_base_ = 'mmseg::_base_/datasets/ade20k.py'

data_root = '{{$MMVTTT_DATA:data}}/ade/ADEChallengeData2016'

train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

# Crops of one size: one graph of the backbone, when training on a GPU.
compile_blocks = dict(dynamic=False, whole=True)
