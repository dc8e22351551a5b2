"""Which hosts are this machine itself."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host, as in a URL or a setting, is this machine and no other."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
