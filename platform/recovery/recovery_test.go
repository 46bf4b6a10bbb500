package recovery

import (
	"errors"
	"testing"
)

// A panic becomes an error that names its operation. An error does not change.
func TestAPanicIsAnError(t *testing.T) {
	run := func(f func() error) (err error) {
		defer ToError("reading pods/x", &err)
		return f()
	}
	var none map[string]int
	if err := run(func() error {
		none["a"] = 1
		return nil
	}); err == nil || err.Error() != "reading pods/x panicked: assignment to entry in nil map" {
		t.Errorf("%v", err)
	}
	want := errors.New("as it was")
	if err := run(func() error { return want }); err != want {
		t.Errorf("%v", err)
	}
	if err := run(func() error { return nil }); err != nil {
		t.Errorf("%v", err)
	}
}
