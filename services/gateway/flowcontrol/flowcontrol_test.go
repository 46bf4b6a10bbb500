package flowcontrol

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	fcrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/client-go/kubernetes/fake"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/watchable"
)

// newRequest returns a request as the filter sees it.
func newRequest(t *testing.T, method, target string) *http.Request {
	t.Helper()
	req := httptest.NewRequest(method, target, strings.NewReader(""))
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		t.Fatal(err)
	}
	ctx := request.WithRequestInfo(t.Context(), info)
	jane := &user.DefaultInfo{Name: "jane", Groups: []string{user.AllAuthenticated}}
	return req.WithContext(request.WithUser(ctx, jane))
}

func newTestFairness(seats int) *Fairness {
	f := &Fairness{client: fake.NewClientset(), seats: seats, gateways: &watchable.Value[int]{},
		sizes: newListSizes()}
	f.active.Store(f.controller(seats))
	return f
}

// A list takes seats by the size of its last response. Every other request takes a single seat.
func TestAListTakesTheSeatsOfItsBytes(t *testing.T) {
	f := newTestFairness(600)
	const pods = "/api/v1/namespaces/x/pods"
	f.RecordListSize(newRequest(t, "GET", pods), 10*bytesPerSeat, false)
	f.RecordListSize(newRequest(t, "GET", pods+"?limit=500"), 3*bytesPerSeat-1, false)
	f.RecordListSize(newRequest(t, "GET", pods+"?limit=500&continue=abc"), 2*bytesPerSeat, false)
	f.RecordListSize(newRequest(t, "GET", "/api/v1/pods"), 1<<40, false)
	f.RecordListSize(newRequest(t, "GET", "/api/v1/secrets"), 100, false)
	f.RecordListSize(newRequest(t, "GET", "/api/v1/watch/namespaces/x/pods/a"), 500, false) // of a single object
	for target, want := range map[string]uint64{
		pods:                                 10,
		pods + "?resourceVersion=0":          10, // the same size from a cache
		pods + "?limit=500":                  3,
		pods + "?limit=500&continue=def":     3,  // as the first page
		pods + "?continue=def":               10, // as all pages
		pods + "?limit=64&continue=def":      2,
		pods + "?labelSelector=a":            10, // it may match all objects
		pods + "?limit=64":                   2,
		pods + "?limit=1001":                 10,
		pods + "?watch=1":                    10,
		pods + "?watch=1&resourceVersion=7":  1,
		pods + "?watch=1&resourceVersion=0":  10,
		pods + "?watch=1&resourceVersion=00": 10,
		pods + "/a":                          1,
		"/api/v1/pods":                       maxSeats,
		"/api/v1/secrets":                    1,
		"/api/v1/namespaces/y/pods":          1,
		pods + "?limit=2251799813685249":     10, // 2^51+1, whose bytes overflow
		pods + "/":                           10,
		pods + "//":                          10,
		pods + "?watch=1&limit=1":            10, // the limit is ignored
		"/api/v1/watch/namespaces/x/pods":    10,
		pods + "?watch=1&sendInitialEvents=1&resourceVersion=7":     10,
		pods + "?watch=1&sendInitialEvents=yes&resourceVersion=7":   10,
		pods + "?watch=1&sendInitialEvents=False&resourceVersion=7": 1,
	} {
		if got := f.estimate(newRequest(t, "GET", target), "", "none"); got.InitialSeats != want ||
			got.FinalSeats != 0 {
			t.Errorf("%s takes %v, not %d seats", target, got, want)
		}
	}
	compressed := func(target string) *http.Request {
		r := newRequest(t, "GET", target)
		r.Header.Set("Accept-Encoding", "gzip")
		return r
	}
	f.RecordListSize(compressed(pods), 16*bytesPerSeat, true)
	f.RecordListSize(newRequest(t, "GET", pods), 16*bytesPerSeat, false)
	f.RecordListSize(compressed(pods+"?watch=1"), 16*bytesPerSeat, false)
	for name, c := range map[string]struct {
		r    *http.Request
		want uint64
	}{
		"as it is":                  {newRequest(t, "GET", pods), 16},
		"compressed":                {compressed(pods), 4},
		"a part not yet asked for":  {compressed(pods + "?labelSelector=a"), 16},
		"in a form of registry's":   {compressed(pods + "?pretty=1"), 16},
		"as it was at a revision":   {compressed(pods + "?resourceVersion=7&resourceVersionMatch=Exact"), 16},
		"a watch is not compressed": {compressed(pods + "?watch=1"), 16},
		"another, which never came": {compressed("/api/v1/pods"), maxSeats},
	} {
		if got := f.estimate(c.r, "", "none"); got.InitialSeats != c.want {
			t.Errorf("%s takes %v, not %d seats", name, got, c.want)
		}
	}
	f.RecordListSize(compressed(pods+"?pretty=1"), 16*bytesPerSeat, false)
	if got := f.estimate(compressed(pods), "", "none"); got.InitialSeats != 4 {
		t.Errorf("after a pretty request it takes %v", got)
	}
	asTable := compressed(pods)
	asTable.Header.Set("Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")
	f.RecordListSize(asTable, 16*bytesPerSeat, true)
	if got := f.estimate(asTable, "", "none"); got.InitialSeats != 16 {
		t.Errorf("a Table takes %v", got)
	}
	f.RecordListSize(compressed(pods), 16*bytesPerSeat, false)
	if got := f.estimate(compressed(pods), "", "none"); got.InitialSeats != 16 {
		t.Errorf("a list that the tier no longer compresses takes %v", got)
	}
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
		if got := f.estimate(newRequest(t, method, pods+"/a"), "", "none"); got.InitialSeats != 1 ||
			got.AdditionalLatency != 0 {
			t.Errorf("%s takes %v", method, got)
		}
	}
	f.RecordListSize(newRequest(t, "GET", pods), 5, false)
	if got := f.estimate(newRequest(t, "GET", pods), "", "none"); got.InitialSeats != 1 {
		t.Errorf("a list that has become small takes %v", got)
	}
	for i := range 2 * maxListSizes {
		f.RecordListSize(newRequest(t, "GET", fmt.Sprintf("%s?labelSelector=l%d", pods, i)), 1<<30, false)
	}
	if n := f.sizes.exact.Len() + f.sizes.whole.Len(); n > 2*maxListSizes {
		t.Errorf("%d lists are cached", n)
	}
	var none *Fairness
	none.RecordListSize(newRequest(t, "GET", pods), 5, false) // flow control is off
}

// Without the gate WatchList, the initial events of a watch take a single seat, as in kube-apiserver.
func TestAWatchTakesOneSeatWithoutWatchList(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.WatchList, false)
	f := newTestFairness(600)
	const pods = "/api/v1/namespaces/x/pods"
	f.RecordListSize(newRequest(t, "GET", pods), 10*bytesPerSeat, false)
	for target, want := range map[string]uint64{
		pods:                                10,
		pods + "?watch=1":                   1,
		pods + "?watch=1&resourceVersion=0": 1,
	} {
		if got := f.estimate(newRequest(t, "GET", target), "", "none"); got.InitialSeats != want {
			t.Errorf("%s takes %v, not %d seats", target, got, want)
		}
	}
}

// The format of a list is the format that its Accept header negotiates.
func TestTheFormatOfAList(t *testing.T) {
	for accept, want := range map[string]string{
		"": "json", "*/*": "json", "application/*": "json", "text/plain, application/yaml": "yaml",
		"application/json, x/as=PartialObjectMetadata":                                      "json",
		"application/json;q=0.1;as=Table;g=meta.k8s.io;v=v1, application/json":              "json",
		"application/json;as=Table;g=x;v=v1, application/json":                              "json",
		"application/json;as=Table;g=meta.k8s.io;v=v1, application/json":                    "json;as=Table",
		"application/vnd.kubernetes.protobuf, application/json":                             "vnd.kubernetes.protobuf",
		"application/vnd.kubernetes.protobuf;as=Table;g=meta.k8s.io;v=v1, application/json": "json",

		"application/yaml;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1": "yaml;as=PartialObjectMetadataList",
	} {
		if got := outputFormat(accept); got != want {
			t.Errorf("%s: %q, not %q", accept, got, want)
		}
	}
}

// ListSize returns the size of an equal list only.
func TestSizesOfEqualLists(t *testing.T) {
	f := newTestFairness(100)
	const pods = "/api/v1/namespaces/x/pods"
	f.RecordListSize(newRequest(t, "GET", pods), 1000, false)
	if got := f.ListSize(newRequest(t, "GET", pods)); got != 1000 {
		t.Errorf("%d bytes", got)
	}
	if got := f.ListSize(newRequest(t, "GET", pods+"?labelSelector=a")); got != 0 {
		t.Errorf("%d bytes of a part that is not recorded", got)
	}
}

// A write takes a single seat, regardless of the size of its resource's list.
func TestAWriteTakesOneSeat(t *testing.T) {
	f := newTestFairness(600)
	const pods = "/api/v1/namespaces/x/pods"
	f.RecordListSize(newRequest(t, "GET", pods), 10*bytesPerSeat, false)
	for _, r := range [][2]string{{"POST", pods}, {"PUT", pods + "/a"}, {"PATCH", pods + "/a"}, {"DELETE", pods}} {
		if got := f.estimate(newRequest(t, r[0], r[1]), "", "none"); got.InitialSeats != 1 || got.FinalSeats != 0 {
			t.Errorf("%s %s takes %v", r[0], r[1], got)
		}
	}
}

// Flow control matches a request by its own RequestInfo, not by the RequestInfo that labels its metrics.
func TestFlowsAreOfTheRequestsOwnInfo(t *testing.T) {
	seen := &handled{}
	f := newTestFairness(1)
	f.active.Store(&controller{Interface: seen})
	own := &request.RequestInfo{IsResourceRequest: true, Verb: "get", Resource: "builds"}
	h := f.Filter(http.NotFoundHandler(), nil, func(context.Context, *request.RequestInfo) *request.RequestInfo {
		return own
	}, time.Minute)
	h.ServeHTTP(httptest.NewRecorder(), newRequest(t, "GET", "/"))
	if seen.info != own {
		t.Errorf("it matches %+v", seen.info)
	}
}

// handled is flow control that admits every request.
type handled struct {
	flowcontrol.Interface
	info *request.RequestInfo
}

func (h *handled) Handle(_ context.Context, r flowcontrol.RequestDigest,
	note func(*flowcontrolv1.FlowSchema, *flowcontrolv1.PriorityLevelConfiguration, string),
	_ func() fcrequest.WorkEstimate, _ fairqueuing.QueueNoteFn, run func()) {
	h.info = r.RequestInfo
	note(&flowcontrolv1.FlowSchema{}, &flowcontrolv1.PriorityLevelConfiguration{}, "")
	run()
}
