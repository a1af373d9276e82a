"""Converting, whatever the format: name tables, transforms, reading of untrusted files, resumable
writing.
"""
