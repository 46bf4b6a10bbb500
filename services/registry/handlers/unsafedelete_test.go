package handlers_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

const ignoreReadErrors = `{"ignoreStoreReadErrorWithClusterBreakingPotential":true`

// putRubbish puts a value into etcd that is no object.
func putRubbish(t *testing.T, fx *fixture.Fixture, key string) {
	t.Helper()
	if _, err := fx.Resources.Storage.Client.Client.Put(t.Context(), key, "rubbish"); err != nil {
		t.Fatal(err)
	}
}

// With AllowUnsafeMalformedObjectDeletion, an object that cannot be read is deleted by its name, without admission. The
// texts are kube-apiserver's.
func TestUnsafeDeletion(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate,
		features.AllowUnsafeMalformedObjectDeletion, true)
	fx := fixture.New(t)
	namespaces := &commonv1.Resource{Version: "v1", Resource: "namespaces"}
	run(t, fx, write{verb: "create", body: configMap("bad", "}"), code: 201}, // the write cache has it
		write{verb: "create", body: configMap("fine", "}"), code: 201})
	putRubbish(t, fx, "/registry/configmaps/x/bad")
	run(t, fx,
		write{verb: "delete", name: "bad",
			fails: "500 InternalError Internal error occurred: StorageError: corrupt object, Code: 7, Key: /configmaps/x/bad"},
		write{verb: "delete", name: "bad", body: ignoreReadErrors + `,"gracePeriodSeconds":1}`,
			fails: "422 Invalid DeleteOptions.meta.k8s.io \"\" is invalid: ignoreStoreReadErrorWithClusterBreakingPotential: " +
				"Invalid value: true: cannot be set together with .gracePeriodSeconds"},
		write{verb: "delete", name: "fine", body: ignoreReadErrors + "}",
			fails: `422 Invalid configmaps "fine" is invalid: ignoreStoreReadErrorWithClusterBreakingPotential: ` +
				`Invalid value: true: is exclusively used to delete corrupt object(s)`},
		write{verb: "deletecollection", body: ignoreReadErrors + "}",
			fails: `422 Invalid DeleteOptions.meta.k8s.io "" is invalid: ` +
				`ignoreStoreReadErrorWithClusterBreakingPotential: Invalid value: true: is not allowed with DELETECOLLECTION`},
		write{verb: "delete", resource: namespaces, name: "x", body: ignoreReadErrors + "}",
			fails: "500 InternalError Internal error occurred: no unsafe deleter provided"},
	)
	unsafe := func(denies string) (*registryv1.ObjectResponse, *fixture.Callbacks, error) {
		callbacks := &fixture.Callbacks{Denies: denies}
		resp, err := fx.Write(t.Context(), fixture.ConfigMaps, &registryv1.WriteRequest{Verb: "delete", Name: "bad",
			Body: []byte(ignoreReadErrors + "}"), AuditLevel: commonv1.AuditLevel_AUDIT_LEVEL_METADATA}, callbacks)
		return resp, callbacks, err
	}
	const verb = "unsafe-delete-ignore-read-errors"
	if _, _, err := unsafe(verb); !strings.HasPrefix(status(err), `403 Forbidden configmaps "bad" is forbidden: `+
		`not permitted to do "`+verb+`", reason: the test denies`) {
		t.Errorf("without permission: %s", status(err))
	}
	resp, callbacks, err := unsafe("")
	if err != nil {
		t.Fatal(status(err))
	}
	if !json.Valid(resp.Body) || !strings.Contains(string(resp.Body), `"status":"Success"`) ||
		!slices.Equal(callbacks.Reviews, nil) {
		t.Errorf("%s, after the reviews %q", resp.Body, callbacks.Reviews)
	}
	if _, ok := resp.Audit.Annotations["apiserver.k8s.io/unsafe-delete-ignore-read-error"]; !ok {
		t.Errorf("the audit annotations are %v", resp.Audit.Annotations)
	}
	run(t, fx, write{verb: "delete", name: "bad", fails: "404 NotFound"},
		write{verb: "create", body: configMap("bad", "}"), code: 201})
}

// Without the feature gate, the option has no effect.
func TestUnsafeDeletionNeedsItsGate(t *testing.T) {
	fx := fixture.New(t)
	run(t, fx, write{verb: "create", body: configMap("fine", "}"), code: 201})
	putRubbish(t, fx, "/registry/configmaps/x/bad")
	run(t, fx, write{verb: "delete", name: "bad", body: ignoreReadErrors + "}", fails: "illegal base64"},
		write{verb: "delete", name: "fine", body: ignoreReadErrors + "}", code: 200})
}
