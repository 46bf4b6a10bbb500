package main

import (
	"os"
	"path/filepath"
	"testing"

	"watershed.dev/test/harness"
)

// TestEveryMistakeApplies checks that the source still contains the code that each defect replaces.
func TestEveryMistakeApplies(t *testing.T) {
	for _, b := range everyBreakage() {
		text, err := os.ReadFile(filepath.Join(harness.Root(), b.file))
		if err == nil {
			err = b.applies(string(text))
		}
		if err != nil {
			t.Error(err)
		}
	}
}
