"""Attention kernels, scans, masks and losses: functions of tensors. No parts and no modules."""
