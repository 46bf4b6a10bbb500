package controllers

import (
	"context"
	"errors"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	extensionsfake "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/fake"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	restclient "k8s.io/client-go/rest"
)

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A term that ends before the informer of CRDs has synced leaves no goroutine.
func TestATermWithoutCRDsLeavesNoGoroutine(t *testing.T) {
	cs := newControllers(t)
	cs.Extensions = extensions.NewSharedInformerFactory(extensionsfake.NewClientset(), 0) // does not start
	cs.Loopback = &restclient.Config{Transport: roundTripper(func(*http.Request) (*http.Response, error) {
		return nil, errors.New("the test has no server")
	})}
	term, end := context.WithCancel(t.Context())
	defer end()
	if err := cs.registerAPIServices(term, &hooksTerm{}); err != nil {
		t.Fatal(err)
	}
	end()
	stacks := make([]byte, 1<<20)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := string(stacks[:runtime.Stack(stacks, true)])
		if !strings.Contains(left, "registerAPIServices") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(left)
		}
	}
}
