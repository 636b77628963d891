"""Networks, training and measurements that are not part of the installed packages."""
