package recovery

import (
	"errors"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
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

// Every panic is counted, also a panic that upstream's HandleCrash recovers. An abort is no panic.
func TestPanicsAreCounted(t *testing.T) {
	crashes := utilruntime.ReallyCrash
	utilruntime.ReallyCrash = false
	defer func() { utilruntime.ReallyCrash = crashes }()
	for _, c := range []struct {
		name string
		run  func(*error)
		want float64
	}{
		{"ToError", func(err *error) { defer ToError("a test", err); panic("a bug") }, 1},
		{"HandleCrash", func(*error) { defer utilruntime.HandleCrash(); panic("a bug") }, 1},
		{"an abort", func(*error) { defer utilruntime.HandleCrash(); panic(http.ErrAbortHandler) }, 0},
	} {
		before := testutil.ToFloat64(panics)
		c.run(new(error))
		if got := testutil.ToFloat64(panics) - before; got != c.want {
			t.Errorf("%s counts %v panics, not %v", c.name, got, c.want)
		}
	}
}
