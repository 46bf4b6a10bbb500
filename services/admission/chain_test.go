package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"k8s.io/client-go/rest"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/paths"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// cluster is a fake Kubernetes API: the objects of lists, by path. It does not change.
type cluster map[string][]string

func (c cluster) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	switch path := req.URL.Path; {
	case info.Verb == "get" && info.IsResourceRequest: // an object that no list has is not found
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,`+
			`"message":"%s %q not found"}`, info.Resource, info.Name)
	case path == "/api":
		fmt.Fprint(w, `{"kind":"APIVersions","versions":[]}`)
	case path == "/apis":
		fmt.Fprint(w, `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`)
	case strings.HasPrefix(path, "/openapi/"):
		fmt.Fprint(w, strings.Join(c[path], ""))
	case req.URL.Query().Get("sendInitialEvents") != "": // the client falls back to a list
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	case req.URL.Query().Get("watch") != "":
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
	default:
		fmt.Fprintf(w, `{"metadata":{"resourceVersion":"10"},"items":[%s]}`, strings.Join(c[path], ","))
	}
}

// kubeconfig returns a kubeconfig for c.
func (c cluster) kubeconfig(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u","user":{}}],
		"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, s.URL)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// clusterClient returns the connection of the cluster that the service's kubeconfig names.
func clusterClient(t *testing.T, c *Config) *apiclient.Conn {
	t.Helper()
	client, err := apiclient.Connect(nil, c.Kubeconfig, "admission")
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// chain returns a chain of the default plugins. It has read a cluster with namespace x and its default service account.
func chain(t *testing.T, add cluster, flags ...string) admissionv1.AdmissionClient {
	t.Helper()
	c := cluster{
		"/api/v1/namespaces":      {`{"metadata":{"name":"x","labels":{"kubernetes.io/metadata.name":"x"}}}`},
		"/api/v1/serviceaccounts": {`{"metadata":{"name":"default","namespace":"x"}}`},
	}
	for path, items := range add {
		c[path] = append(c[path], items...)
	}
	config := NewConfig()
	fs := pflag.NewFlagSet("admission", pflag.ContinueOnError)
	config.AddFlags(fs)
	if err := fs.Parse(append([]string{"--kubeconfig=" + c.kubeconfig(t)}, flags...)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s, err := New(ctx, config, clusterClient(t, config))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	waiting, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	if err := s.Policies().Wait(waiting); err != nil {
		t.Fatal(err)
	}
	p := rpc.NewInProcess(false)
	s.Register(p)
	return admissionv1.NewAdmissionClient(p.Client("gateway"))
}

// creationOf returns a review of a creation in namespace x.
func creationOf(kind, resource, namespace, object string) *admissionv1.Review {
	return &admissionv1.Review{
		Operation: admissionv1.Operation_OPERATION_CREATE,
		Kind:      &commonv1.Kind{Version: "v1", Kind: kind},
		Resource:  &commonv1.Resource{Version: "v1", Resource: resource},
		Namespace: namespace,
		Name:      "n",
		User:      &commonv1.User{Name: "jane", Groups: []string{"system:authenticated"}},
		Object:    []byte(object),
		MediaType: "application/json",
	}
}

func pod(spec string) string {
	return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n","namespace":"x"},"spec":` + spec + `}`
}

// The chain applies its plugins' changes, keeps the rest of the object, and rejects with kube-apiserver's messages.
func TestTheChainAdmits(t *testing.T) {
	a := chain(t, cluster{"/api/v1/limitranges": {`{"metadata":{"name":"l","namespace":"x"},` +
		`"spec":{"limits":[{"type":"Container","default":{"cpu":"2"},"max":{"cpu":"4"}}]}}`}})
	v, err := a.Admit(t.Context(), creationOf("Pod", "pods", "x", pod(`{"containers":[{"name":"c","image":"i"}]}`)))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Spec struct {
			ServiceAccountName string
			Tolerations        []struct{ Key string }
			Containers         []struct {
				Resources struct{ Limits map[string]string }
			}
		}
	}
	if err := json.Unmarshal(v.Object, &got); err != nil {
		t.Fatal(err)
	}
	if got.Spec.ServiceAccountName != "default" || len(got.Spec.Tolerations) != 2 ||
		got.Spec.Containers[0].Resources.Limits["cpu"] != "2" {
		t.Errorf("%s", v.Object)
	}
	if v, err := a.Admit(t.Context(), creationOf("ConfigMap", "configmaps", "x",
		`{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"n","namespace":"x"}}`+"\n")); err != nil ||
		len(v.Object) != 0 {
		t.Errorf("%s, %v", v.GetObject(), err)
	}
	for says, r := range map[string]*admissionv1.Review{
		`(get namespaces y)`: creationOf("ConfigMap", "configmaps", "y",
			`{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"n","namespace":"y"}}`),
		`error looking up service account x/other`: creationOf("Pod", "pods", "x",
			pod(`{"serviceAccountName":"other","containers":[{"name":"c","image":"i"}]}`)),
	} {
		if _, err := a.Admit(t.Context(), r); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	tooLarge := creationOf("Pod", "pods", "x", pod(`{"serviceAccountName":"default","containers":[`+
		`{"name":"c","image":"i","resources":{"limits":{"cpu":"8"},"requests":{"cpu":"8"}}}]}`))
	if _, err := a.Validate(t.Context(), tooLarge); status.Code(err) != codes.PermissionDenied ||
		!strings.Contains(err.Error(), "maximum cpu usage per Container is 4, but limit is 8") {
		t.Errorf("%v", err)
	}
	if _, err := a.Admit(t.Context(), creationOf("Pod", "pods", "x", "{")); err == nil {
		t.Error("half an object is admitted")
	}
}

// A policy rejects by its expression, with its message, and only objects that it matches.
func TestAPolicyRefuses(t *testing.T) {
	const group = "/apis/admissionregistration.k8s.io/v1/"
	a := chain(t, cluster{
		group + "validatingadmissionpolicies": {`{"metadata":{"name":"p","generation":1},"spec":{"failurePolicy":"Fail",
			"matchConstraints":{"resourceRules":[{"apiGroups":[""],"apiVersions":["v1"],"resources":["configmaps"],
			"operations":["CREATE"],"scope":"*"}],"namespaceSelector":{},"objectSelector":{},
			"matchPolicy":"Equivalent"},
			"validations":[{"expression":"!('bad' in object.data)","message":"nothing bad"}]}}`},
		group + "validatingadmissionpolicybindings": {`{"metadata":{"name":"b"},"spec":{"policyName":"p",
			"validationActions":["Deny"]}}`},
	})
	validateConfigMap := func(data string) error {
		_, err := a.Validate(t.Context(), creationOf("ConfigMap", "configmaps", "x",
			`{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"n","namespace":"x"},"data":`+data+`}`))
		return err
	}
	// the policy's own controller compiles it a moment after reading it
	var err error
	for until := time.Now().Add(2 * time.Minute); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		if err = validateConfigMap(`{"bad":""}`); err != nil && strings.Contains(err.Error(), "nothing bad") {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "nothing bad") {
		t.Errorf("%v", err)
	}
	if err := validateConfigMap(`{"good":""}`); err != nil {
		t.Errorf("%v", err)
	}
	stream, err := a.AdmissionRules(t.Context(), &admissionv1.AdmissionRulesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	hasRule := func(set *admissionv1.AdmissionRuleSet) bool {
		return slices.ContainsFunc(set.GetValidate(), func(i *admissionv1.AdmissionRule) bool {
			return i.Resource == "configmaps" || i.Resource == "*" && i.Group == "*" && len(i.Operations) == 4
		})
	}
	for range 2 { // the rules are sent again although they are unchanged
		if set, err := stream.Recv(); err != nil || !hasRule(set) {
			t.Errorf("%v, %v", set, err)
		}
	}
}

// Stale policies decide nothing. The control plane's own writes continue.
func TestAnUnsyncedChainIsUnavailable(t *testing.T) {
	config := NewConfig()
	fs := pflag.NewFlagSet("admission", pflag.ContinueOnError)
	config.AddFlags(fs)
	if err := fs.Parse([]string{"--kubeconfig=" + cluster{}.kubeconfig(t)}); err != nil {
		t.Fatal(err)
	}
	s, err := New(t.Context(), config, clusterClient(t, config))
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Admit(t.Context(), creationOf("ConfigMap", "configmaps", "x", "{}"))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
	if s.Ready().Err() != nil || s.Policies().Err() == nil {
		t.Errorf("ready: %v, policies: %v", s.Ready().Err(), s.Policies().Err())
	}
	p := rpc.NewInProcess(false)
	s.Register(p)
	var stream grpc.ServerStreamingClient[admissionv1.AdmissionRuleSet]
	if stream, err = admissionv1.NewAdmissionClient(p.Client("gateway")).AdmissionRules(t.Context(),
		&admissionv1.AdmissionRulesRequest{}); err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

// An invalid configuration is rejected with the name of its flag.
func TestAnOddConfigurationIsRefused(t *testing.T) {
	for says, flags := range map[string][]string{
		"Nothing": {"--enable-admission-plugins=Nothing"},
	} {
		config := NewConfig()
		fs := pflag.NewFlagSet("admission", pflag.ContinueOnError)
		config.AddFlags(fs)
		if err := fs.Parse(flags); err != nil {
			t.Fatal(err)
		}
		_, err := New(t.Context(), config, &apiclient.Conn{Config: &rest.Config{Host: "https://127.0.0.1:1"}})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", flags, err)
		}
	}
}
