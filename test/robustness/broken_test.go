package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestEveryMistakeApplies checks that the source still contains the code that each defect replaces.
func TestEveryMistakeApplies(t *testing.T) {
	for _, b := range everyBreakage() {
		overlay, err := b.overlay(b.edits())
		if err != nil {
			t.Error(err)
			continue
		}
		_ = os.RemoveAll(filepath.Dir(overlay))
	}
}
