package warnings

import (
	"fmt"
	"strings"
	"testing"
)

// Endless warnings use no more memory than the bound of a response.
func TestWarningsAreBounded(t *testing.T) {
	_, r := WithRecorder(t.Context())
	for i := range 1_000_000 {
		r.AddWarning("", fmt.Sprintf("unknown field %d", i))
	}
	if n := len(r.List()); n < 100 || n > 400 {
		t.Errorf("%d warnings are kept", n)
	}
	_, r = WithRecorder(t.Context())
	r.AddWarning("", strings.Repeat("ü", 1<<20))
	r.AddWarning("", "short")
	r.AddWarning("", "short")
	r.AddWarning("", "")
	if l := r.List(); len(l) != 2 || len([]rune(l[0])) != maxRunes+1 || l[1] != "short" {
		t.Errorf("%d are kept, the first of %d bytes", len(l), len(l[0]))
	}
}
