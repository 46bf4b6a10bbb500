package telemetry

import (
	"bytes"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

func TestVModule(t *testing.T) {
	var b bytes.Buffer
	o := Options{VModule: "vmodule_*=5,other=9"}
	stop, err := o.Start(t.Context(), "test", &b)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	klog.V(5).InfoS("five")
	klog.V(6).InfoS("six")
	klog.FromContext(t.Context()).V(5).Info("five by context")
	klog.FromContext(t.Context()).V(6).Info("six by context")
	klog.InfoS("zero")
	for text, want := range map[string]bool{
		"five":            true,
		"six":             false,
		"five by context": true,
		"six by context":  false,
		"zero":            true,
	} {
		if got := strings.Contains(b.String(), `msg="`+text+`"`) ||
			strings.Contains(b.String(), "msg="+text+" "); got != want {
			t.Errorf("%q is logged: %v\n%s", text, got, b.String())
		}
	}
	for _, bad := range []string{"x", "x=", "=5", "x=-1", "x=a", "[=5"} {
		if _, err := (&Options{VModule: bad}).Start(t.Context(), "test", &b); err == nil {
			t.Errorf("--vmodule=%s is accepted", bad)
		}
	}
}
