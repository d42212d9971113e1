"""Dashboards and alerts of tools/grafana, with a real Prometheus on a loaded engine. Where Prometheus or promtool is missing,
these tests are left out, and the summary says so."""
