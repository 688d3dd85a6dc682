"""Deployments: models that answer from processes of their own, which outlive the process that started them.

client = serve("folder/of/a/model")     # starts supervisor.py, which starts replica.py once for each replica
client = client("folder/of/a/model")    # finds it again, from any process of the user on this host
"""

from deepspeed_c.mii.deployment.client import MIIClient
from deepspeed_c.mii.deployment.start import client, serve

__all__ = ["MIIClient", "client", "serve"]
