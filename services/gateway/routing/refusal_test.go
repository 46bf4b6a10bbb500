package routing

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const asTable = "application/json;as=Table;v=v1;g=meta.k8s.io"

// A rejected watch makes registry read at most one object. A selector without a match would make it read the whole
// resource.
func TestARefusedWatchReadsNoMoreThanOneObject(t *testing.T) {
	const pods = "/api/v1/namespaces/x/pods?watch=1&resourceVersion=1&"
	for query, wantSelector := range map[string]string{
		"includeObject=Bogus&labelSelector=no%3Dsuch":                "",
		"includeObject=Bogus&fieldSelector=metadata.name%3Dno":       "",
		"labelSelector=no%3Dsuch&fieldSelector=spec.unknown%3Dvalue": "spec.unknown=value", // refused before any read
	} {
		var requested url.Values
		r := newTestRouter(t, &fakeBackends{
			listFunc: func(r *registryv1.GetRequest, _ grpc.ServerStreamingServer[registryv1.ListChunk]) error {
				requested, _ = url.ParseQuery(r.Query)
				return rpc.ToStatus(apierrors.NewBadRequest("as registry says"))
			}})
		code, body := doRequest(t, r, "GET", pods+query, "", "Accept", asTable)
		if code != 400 || !strings.Contains(body, "as registry says") {
			t.Errorf("%s: %d %s", query, code, body)
		}
		if requested.Get("limit") != "1" || requested.Has("labelSelector") ||
			requested.Get("fieldSelector") != wantSelector {
			t.Errorf("%s: registry is asked for %v", query, requested)
		}
	}
}

// Registry may know a selectable field of a CRD before the gateway does. Clients then try again.
func TestAWatchOfAFieldOfANewerCRD(t *testing.T) {
	r := newTestRouter(t, &fakeBackends{
		listFunc: func(*registryv1.GetRequest, grpc.ServerStreamingServer[registryv1.ListChunk]) error { return nil },
	})
	code, body := doRequest(t, r, "GET", "/api/v1/pods?watch=1&fieldSelector=spec.new%3Dx", "")
	if code != 503 || !strings.Contains(body, "does not have the field yet") {
		t.Errorf("%d %s", code, body)
	}
}

// Router.Lists also bounds the lists for rejected watches. newTestRouter allows a single list at a time.
func TestRefusedWatchesShareTheBoundOfLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var underWay, read int
		may := make(chan struct{})
		r := newTestRouter(t, &fakeBackends{
			listFunc: func(*registryv1.GetRequest, grpc.ServerStreamingServer[registryv1.ListChunk]) error {
				underWay++
				read++
				<-may
				underWay--
				return rpc.ToStatus(apierrors.NewBadRequest("as registry says"))
			}})
		const watches = 8
		var wg sync.WaitGroup
		for i := range watches {
			wg.Go(func() {
				doRequest(t, r, "GET", fmt.Sprintf("/api/v1/pods?watch=1&includeObject=Bogus%d", i), "",
					"Accept", asTable)
			})
		}
		for range watches {
			synctest.Wait()
			if underWay != 1 {
				t.Errorf("%d lists are under way at a time", underWay)
			}
			may <- struct{}{}
		}
		wg.Wait()
		if read != watches {
			t.Errorf("%d lists for %d watches", read, watches)
		}
	})
}

// A list of a resource of another etcd has no place among the lists of the main etcd.
func TestListsOfAnotherEtcdHaveTheirOwnBound(t *testing.T) {
	groups := NewListGroups(func() *coalesce.Group[[]byte] {
		return &coalesce.Group[[]byte]{Limit: 1, Timeout: time.Minute}
	})
	list := func(log, key string, read func()) {
		_, err := groups.of(log).GetFor(t.Context(), "user", key, func(context.Context) ([]byte, error) {
			read()
			return nil, nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	list("events", "a", func() { list("", "b", func() {}) })
}
