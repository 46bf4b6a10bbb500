package patchlimit

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
)

// A patch whose copies double the document fails before they add more than maxCopyBytes.
func TestCopiesAreBounded(t *testing.T) {
	var ops []string
	for i := range 20 { // 12 MB without the bound, and twice as much with each further copy
		ops = append(ops, fmt.Sprintf(`{"op":"copy","from":"/data","path":"/data/x%d"}`, i))
	}
	patch, err := jsonpatch.DecodePatch([]byte("[" + strings.Join(ops, ",") + "]"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = patch.Apply([]byte(`{"data":{"k":"v"}}`))
	if tooMuch := new(jsonpatch.AccumulatedCopySizeError); !errors.As(err, &tooMuch) {
		t.Errorf("the patch is applied: %v", err)
	}
}
