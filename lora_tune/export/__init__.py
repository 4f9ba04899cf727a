# SPDX-License-Identifier: Apache-2.0
"""What a run has trained, to folders and to the hub."""
