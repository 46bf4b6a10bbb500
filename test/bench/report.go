package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

const begin, end = "<!-- measured -->", "<!-- end -->"

// machine returns the date, the number of processors and Go's version, for the heading of a table.
func machine() string {
	return fmt.Sprintf("%s, %d processors, %s",
		time.Now().UTC().Format(time.DateOnly), runtime.NumCPU(), runtime.Version())
}

// publish writes the table between the page's markers, and the values and a plot beside the page.
func publish(m *measured, table string) error {
	data, err := m.document()
	if err != nil {
		return err
	}
	beside := filepath.Join(filepath.Dir(*out), "performance")
	if err := os.MkdirAll(beside, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(beside, "measured.json"), append(data, '\n'), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(beside, "cpu.svg"), []byte(m.bars()), 0o644); err != nil {
		return err
	}
	return writeBetween(*out, begin, end, table+"\n![CPU of each piece of work](performance/cpu.svg)\n")
}

// writeBetween replaces the text of a page between two markers.
func writeBetween(file, begin, end, text string) error {
	page, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(page), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %s … %s", file, begin, end)
	}
	return os.WriteFile(file, []byte(head+begin+"\n"+text+end+tail), 0o644)
}
