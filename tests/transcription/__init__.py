"""Tests of sounds that become text."""
