"""What the engine starts for `--policy-pack infra/policy`: serves the rules until the engine has asked them all."""

import sys
from pathlib import Path

# The engine starts this file by its path, so the repository, whose catalog and rules it reads, is not on the path yet.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pulumi_policy import EnforcementLevel, PolicyPack

from infra.policy.pack import POLICIES

PolicyPack("torchrec-cloud", POLICIES, enforcement_level=EnforcementLevel.MANDATORY)
