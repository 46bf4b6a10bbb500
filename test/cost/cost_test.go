package main

import (
	"slices"
	"testing"
)

// TestShort runs the short form of `make cost`.
func TestShort(t *testing.T) { run(t, options{short: true}) }

// TestShapesHaveNames checks that names of shapes are unique, because the page and known.go use them as keys. Each name
// of the short form must exist.
func TestShapesHaveNames(t *testing.T) {
	var names []string
	for _, s := range shapes() {
		if slices.Contains(names, s.String()) {
			t.Errorf("%s is there twice", s)
		}
		names = append(names, s.String())
	}
	for _, name := range shortForm {
		if !slices.Contains(names, name) {
			t.Errorf("the short form has no %s", name)
		}
	}
}
