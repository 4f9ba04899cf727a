# SPDX-License-Identifier: Apache-2.0
"""`report.html`: what a run was and what came of it, in one file."""
