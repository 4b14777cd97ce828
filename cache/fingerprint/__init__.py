"""What a record is stored under; the README of `cache` says what identifies it."""
