"""Devices, processes and memory that a program runs on."""
