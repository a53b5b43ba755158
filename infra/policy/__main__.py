"""The program that the engine starts for `--policy-pack infra/policy`: it serves the rules over gRPC."""

import sys
from pathlib import Path

# The engine starts this file by its path, so the repository is not on the import path yet.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pulumi_policy import EnforcementLevel, PolicyPack

from infra.policy.pack import POLICIES

PolicyPack("torchrec-cloud", POLICIES, enforcement_level=EnforcementLevel.MANDATORY)
