package main

import (
	"slices"
	"testing"
)

// The short form of `make cost`.
func TestShort(t *testing.T) { run(t, options{short: true}) }

// Rows of the page and reasons name shapes, so each name is there once, and the short form has all of its shapes.
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
