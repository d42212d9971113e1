"""Tests of the built-in page in Chromium; the summary reports them as skipped if Chromium or its driver is missing."""
