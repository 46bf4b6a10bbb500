package main

import "testing"

// The short form of `make cost`.
func TestShort(t *testing.T) { run(t, options{short: true}) }
