package authn

import (
	"context"
	"errors"
	"reflect"

	"k8s.io/apimachinery/pkg/util/validation/field"
	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	apiservervalidation "k8s.io/apiserver/pkg/apis/apiserver/validation"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"
	authenticationconfigmetrics "k8s.io/apiserver/pkg/server/options/authenticationconfig/metrics"
	kubeauthenticator "k8s.io/kubernetes/pkg/kubeapiserver/authenticator"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/reload"
)

// serverID is the label of upstream's reload metrics.
const serverID = "watershed"

// updateTimeout bounds the requests for the keys of new issuers.
var updateTimeout = kubeoptions.UpdateAuthenticationConfigTimeout

// configFile reloads --authentication-config as BuiltInAuthenticationOptions.ApplyTo does
// (k8s.io/kubernetes/pkg/kubeapiserver/options).
type configFile struct {
	path            string
	initial         string
	issuers         []string
	anonymous       *apiserverconfig.AnonymousAuthConfig
	update          func(context.Context, *apiserverconfig.AuthenticationConfiguration) error
	resetTokenCache func()
}

func newConfigFile(path string, c *kubeauthenticator.Config, h *chain) *configFile {
	f := &configFile{
		path:            path,
		initial:         c.AuthenticationConfigData,
		issuers:         c.ServiceAccountIssuers,
		update:          h.updateJWT,
		resetTokenCache: h.resetTokenCache,
	}
	if c.AuthenticationConfig != nil {
		f.anonymous = c.AuthenticationConfig.DeepCopy().Anonymous
	}
	return f
}

// watch reloads the file after each change.
func (f *configFile) watch(files *reload.Files) {
	if f.path == "" || f.update == nil {
		return
	}
	authenticationconfigmetrics.RegisterMetrics()
	authenticationconfigmetrics.RecordAuthenticationConfigLastConfigInfo(serverID, f.initial)
	files.Add("authentication-config", f.path, []byte(f.initial), func(ctx context.Context, data []byte) error {
		if err := f.reload(ctx, data); err != nil {
			authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadFailure(serverID)
			return err
		}
		authenticationconfigmetrics.RecordAuthenticationConfigAutomaticReloadSuccess(serverID, string(data))
		f.resetTokenCache()
		return nil
	})
}

// reload applies a configuration after its issuers have returned their keys.
func (f *configFile) reload(ctx context.Context, data []byte) error {
	// ToAuthenticationConfig parses the file.
	next, err := (&kubeoptions.BuiltInAuthenticationOptions{AuthenticationConfigFile: f.path}).ToAuthenticationConfig()
	if err != nil {
		return err
	}
	if next.AuthenticationConfigData != string(data) {
		return reload.Retryable(errors.New("the file changed while it was read"))
	}
	errs := apiservervalidation.ValidateAuthenticationConfiguration(authenticationcel.NewDefaultCompiler(),
		next.AuthenticationConfig, f.issuers)
	if !reflect.DeepEqual(f.anonymous, next.AuthenticationConfig.Anonymous) {
		errs = append(errs, field.Forbidden(field.NewPath("anonymous"), "changed from initial configuration file"))
	}
	if err := errs.ToAggregate(); err != nil {
		return err
	}
	updateCtx, cancel := context.WithTimeout(ctx, updateTimeout)
	defer cancel()
	if err := f.update(updateCtx, next.AuthenticationConfig); err != nil {
		return reload.Retryable(err)
	}
	return nil
}
