package apiclient

import (
	"context"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// unservedPeriod is how often waitForSync looks for informers whose resource is not served.
const unservedPeriod = 100 * time.Millisecond

// waitForSync waits until the shared informers of all served resources have read their objects, or until ctx ends.
// --runtime-config may disable a resource that a plugin reads. As in kube-apiserver, only that plugin waits for it.
func (s *informerSet) waitForSync(ctx context.Context) {
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, unservedPeriod)
		synced := s.Informers.WaitForCacheSyncWithContext(attempt).Synced
		cancel()
		var unserved []string
		waiting := false
		for t, done := range synced {
			if path := collectionPath(t); !done && s.streams.isUnserved(path) {
				unserved = append(unserved, path)
			} else if !done {
				waiting = true
			}
		}
		if waiting {
			continue
		}
		if len(unserved) > 0 {
			slices.Sort(unserved)
			slog.Warn("Resources are not served; plugins that read them may reject requests", "paths", unserved)
		}
		return
	}
}

// collectionPath returns the path of all objects of a type of an informer.
func collectionPath(t reflect.Type) string {
	obj, ok := reflect.New(t.Elem()).Interface().(runtime.Object)
	if !ok {
		return ""
	}
	kinds, _, err := scheme.Scheme.ObjectKinds(obj)
	if err != nil {
		return ""
	}
	r, _ := meta.UnsafeGuessKindToResource(kinds[0])
	if r.Group == "" {
		return "/api/" + r.Version + "/" + r.Resource
	}
	return "/apis/" + r.Group + "/" + r.Version + "/" + r.Resource
}

// isCollection reports whether a path may be a result of collectionPath. The path of an object is longer.
func isCollection(path string) bool {
	return strings.HasPrefix(path, "/api/") && strings.Count(path, "/") == 3 ||
		strings.HasPrefix(path, "/apis/") && strings.Count(path, "/") == 4
}

// isUnserved reports whether the last list of a path was answered with 404.
func (s *streams) isUnserved(path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unserved[path]
}

// setUnserved records the answer to a list of a path.
func (s *streams) setUnserved(path string, unserved bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unserved[path] = unserved
}
