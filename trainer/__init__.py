"""Sharded DLRM training on TorchRec: one program for one process or many, CPU or GPU."""
